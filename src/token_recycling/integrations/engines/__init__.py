"""What the adapters for engines share."""
