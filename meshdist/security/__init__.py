"""Access control: secrets, the handshake, TLS."""
