"""The user's options: flags, environment, fasttrain.yaml and presets become `Settings`."""
