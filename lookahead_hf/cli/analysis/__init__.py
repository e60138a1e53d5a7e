"""Parts of `lookahead-hf analyze`: prompts and the report."""
