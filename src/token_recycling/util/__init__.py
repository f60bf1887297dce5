"""What all packages use: files, compiled code, locks, the modes of PyTorch."""
