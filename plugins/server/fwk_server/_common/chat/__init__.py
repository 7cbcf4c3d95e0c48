"""The generation pipeline that every dialect shares: a body of OpenAI's chat fields in, answers out."""
