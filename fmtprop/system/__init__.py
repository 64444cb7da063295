"""Services of the process and the operating system: memory, files, locks, the cycle collector, a terminal."""
