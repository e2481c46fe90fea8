"""The engine: token ids in, token ids out. No HTTP and no text."""
