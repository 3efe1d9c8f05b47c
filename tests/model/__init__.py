"""The protocol of decision, delivery and fence, explored exhaustively: docs/model.md says what that means."""
