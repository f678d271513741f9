/* A temporary folder as the working directory of one test. */
#ifndef KV_NAIVE_TEST_FOLDER_H
#define KV_NAIVE_TEST_FOLDER_H

void test_folder_enter(void);
void test_folder_leave(void); /* removes it with all it holds, and goes back */

#endif
