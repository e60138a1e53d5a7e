"""Drafts what a grammar forces, and leaves out what it forbids."""
