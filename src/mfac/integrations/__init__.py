"""Callbacks for training libraries; each room is the only importer of its library, and is imported by name."""
