"""What every room may use: files, folders, sizes, threads. It knows no model."""
