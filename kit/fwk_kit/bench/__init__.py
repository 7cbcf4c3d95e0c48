"""Measuring: loads on OpenAI servers, the engine alone, start-up, comparisons, and the machine's own bounds."""
