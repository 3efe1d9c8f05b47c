"""Version 1 of the Tricord contract: protobuf definitions and the code generated from them."""
