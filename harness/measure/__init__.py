"""What a call takes on the device that is here: time, memory, and the company it had."""
