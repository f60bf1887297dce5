"""What all rooms use: files, compiled code, locks, the modes of PyTorch."""
