"""Drafts what a grammar forces, and drops what it forbids."""
