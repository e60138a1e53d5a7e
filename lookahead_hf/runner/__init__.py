"""The target: the user's model, fed blocks of draft tokens over a cache with ragged rows."""
