"""radixkv."""
