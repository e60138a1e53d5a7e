"""An assistant model that drafts."""
