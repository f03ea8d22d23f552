# program
