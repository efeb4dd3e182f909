"""How bytes move between two peers, whatever carries them and whatever they mean."""
