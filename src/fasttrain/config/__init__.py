"""What does the user want? Flags, environment, fasttrain.yaml and presets become `Settings`."""
