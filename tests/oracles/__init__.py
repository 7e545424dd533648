"""Truth by brute force; nothing here but ``compiled_step`` knows the compiler."""
