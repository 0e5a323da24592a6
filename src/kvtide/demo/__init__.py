"""The main job shown on real input: three real servers, one conversation, a table, a picture and a page."""
