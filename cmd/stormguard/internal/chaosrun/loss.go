// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"fmt"
	"sync"
)

// losses makes the consumers lose packets while a loss lasts, and counts them. The schedule's
// goroutine begins a loss, and starts and ends processes. The loss's own goroutine ends the loss.
type losses struct {
	mu      sync.Mutex
	rules   string      // nft rules that drop packets; empty without a loss
	timers  map[int]int // by pid of each running process: its fired timers at the begin of the loss
	packets int         // packets lost in this loss, by ended processes
	fired   int         // timers fired in this loss, by ended processes
}

// begin begins a loss by rules, for all running processes.
func (l *losses) begin(rules string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rules, l.packets, l.fired = rules, 0, 0
	for pid := range l.timers {
		if err := l.lose(pid); err != nil {
			return err
		}
	}
	return nil
}

func (l *losses) lose(pid int) (err error) {
	if l.timers[pid], err = timers(pid); err != nil {
		return err
	}
	return lose(pid, l.rules)
}

// started adds a process.
func (l *losses) started(pid int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timers[pid] = 0
	if l.rules == "" {
		return nil
	}
	return l.lose(pid)
}

// ends removes a process that is about to end.
func (l *losses) ends(pid int) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rules != "" {
		err = l.count(pid)
	}
	delete(l.timers, pid)
	return err
}

func (l *losses) count(pid int) error {
	n, err := timers(pid)
	if err != nil {
		return fmt.Errorf("the consumer with pid %d: %w", pid, err)
	}
	l.fired += n - l.timers[pid]
	dropped, err := dropped(pid)
	if err != nil {
		return err
	}
	l.packets += dropped
	return keepAll(pid)
}

// soFar is the number of packets that this loss has dropped.
func (l *losses) soFar() (packets int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	packets = l.packets
	for pid := range l.timers {
		n, err := dropped(pid)
		if err != nil {
			return 0, fmt.Errorf("the consumer with pid %d: %w", pid, err)
		}
		packets += n
	}
	return packets, nil
}

// end ends the loss, and returns how many packets it dropped and how many timers fired.
func (l *losses) end() (packets, fired int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for pid := range l.timers {
		if err := l.count(pid); err != nil {
			return 0, 0, err
		}
	}
	l.rules = ""
	return l.packets, l.fired, nil
}
