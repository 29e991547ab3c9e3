"""Finds the configuration of a cluster that bears the highest load within a service level objective."""
