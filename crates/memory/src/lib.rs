//! The memory plane: what moves the container's memory, which CRIU is never shown.
//!
//! Source: [`survey`](mod@survey) finds the address spaces and the ranges that are ours, [`send`](mod@send) reads the pages
//! from the stopped tasks and streams them. Destination: [`receive`] puts them into an arena, and [`pager`] is the process
//! that supplies them to the restored tasks; [`index`] tells where in the arena a page is. Memory that tasks share takes a
//! path of its own: [`shared`]; what the kernel reads of a task for others is there before the task runs: [`arguments`].
//!
//! Without moving anything, [`sample`](mod@sample) watches what a container writes, [`probe`] measures the way to the other
//! node, and [`predict`](mod@predict) tells from both how a move would go.

pub mod arguments;
pub mod compress;
pub mod deduplicate;
pub mod huge;
pub mod hugetlb;
pub mod index;
pub mod maps;
pub mod page_set;
pub mod pager;
pub mod policy;
pub mod predict;
pub mod probe;
pub mod receive;
mod register;
pub mod sample;
pub mod send;
pub mod shared;
pub mod survey;
pub mod tracker;
pub mod unreadable;
