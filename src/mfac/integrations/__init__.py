"""Callbacks for training libraries; each module imports its library, so import it by name."""
