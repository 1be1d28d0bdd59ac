"""An emulated cluster on one machine: hosts, links with a rate between them, and their ranks."""
