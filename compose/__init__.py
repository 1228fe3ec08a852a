"""Processes of one run: `diloco up` on this machine, and the files for Docker Compose."""
