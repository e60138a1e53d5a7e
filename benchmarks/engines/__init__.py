"""Other engines that run the same weights."""
