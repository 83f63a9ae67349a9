"""`eagle doctor`: what a `kill -9`, a power cut or a hand left behind; each finding explained, and mended on demand."""
