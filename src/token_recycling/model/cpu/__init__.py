"""Linear layers and attention for few tokens on a CPU, as LLVM vector code."""
