"""What differs between targets, between library versions, between implementations."""
