"""Gate families of other papers, one file each; hard concrete and rectified gates are beside this folder."""
