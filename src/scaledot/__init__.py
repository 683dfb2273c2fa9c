"""scaledot: scaled dot-product attention that shows its work."""
