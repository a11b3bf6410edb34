"""The embedding engine: texts of several requests, packed into one batch a step."""
