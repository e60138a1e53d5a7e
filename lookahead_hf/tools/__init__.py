"""Programs that use the library: the command, servers, pages. No other room imports them."""
