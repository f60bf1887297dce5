"""Prompts written for the demo; none is in the bundled model's training text."""

# For a model that follows instructions.
CHAT = (
    "Explain in a few sentences why the sky is blue.",
    "Write an email to my landlord. The heating in my flat has not worked since Monday.",
    "Write a Python function that counts how often each word occurs in a text file.",
    "A shop sells pens for $2 and notebooks for $5. Mia buys 6 pens and 3 notebooks. "
    "How much does she pay?",
    "Correct the spelling and return the whole text: The libary opens at nine o'clock on weekdays. "
    "On Saturdays the libary opens at ten o'clock and closes at two. On Sundays the libary is "
    "closed. Members can borow five books for three weeks. Guests can read in the libary but not "
    "borow books.",
    "Give me a packing list for a week of hiking in the mountains.",
    "Tell me a short story about a lighthouse keeper and a storm.",
    "List the planets of the solar system with one fact about each.",
)
# For the bundled model, which was trained on stories, sums and Python functions.
DEMO = (
    "Anna reads 15 pages a day. Her book has 180 pages. How many days does she need to finish it?",
    "Tom has 12 marbles. He buys 3 bags with 8 marbles each and gives 5 marbles to his sister. "
    "How many marbles does Tom have now?",
    "A baker sells 24 rolls in the morning and twice as many in the afternoon. "
    "Each roll costs $2. How much money does the baker make?",
    "A train has 6 wagons with 40 seats each. 55 seats are empty. How many people are on it?",
    "Continue the story: Once upon a time there was an old miller who had a grey cat. "
    "Every evening the cat sat by the door and waited.",
    "Go on with this story: The children ran down to the river. The boat was gone.",
    "Tell me the story of The Fox And The Lantern.",
    "Write a Python function: Return the number of items in the queue.",
)
