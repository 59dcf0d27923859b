"""What walks several rooms: the demo, gates, summaries."""
