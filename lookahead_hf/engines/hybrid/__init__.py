"""Models that keep a recurrent state."""
