"""What runs a program: one folder or file per engine."""
