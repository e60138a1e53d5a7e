"""Optional sources of drafts, imported when they are named."""
