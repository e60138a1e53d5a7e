"""What uses the library: the command, servers, pages. Nothing imports it."""
