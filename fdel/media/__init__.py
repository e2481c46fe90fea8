"""What images and sounds are to a model: decoding and features as plain numpy functions; no jax here."""
