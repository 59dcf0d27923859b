"""What passes between rooms: frozen, versioned, self-describing."""
