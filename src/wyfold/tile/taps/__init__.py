"""A filter slid over tokens, channel by channel."""
