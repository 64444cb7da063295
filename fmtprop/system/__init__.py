"""What this process and its operating system offer: memory, files, locks, the cycle collector, a terminal."""
