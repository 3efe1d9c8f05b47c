"""Root of the generated Tricord contract; the versions live in sub-packages."""
