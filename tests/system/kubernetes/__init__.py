"""Tests of discovery with a real API server of Kubernetes, which `make kubernetes` builds and runs."""
