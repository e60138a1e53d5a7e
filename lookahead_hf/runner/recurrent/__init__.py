"""Draft tokens through layers that keep a recurrent state, rolled back row by row."""
