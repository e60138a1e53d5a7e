"""Pages and files that show a trace."""
