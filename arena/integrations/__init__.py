"""Arena inside engines that others write. Each is imported by its engine, and imports it only when asked to."""
