// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

// A Flow is one path of messages or calls since the process began: see [guard.Flow].
type Flow struct {
	From    Node   `json:"from"`
	To      Node   `json:"to"`
	Count   uint64 `json:"count"`
	Failed  uint64 `json:"failed"`
	Sources int    `json:"sources"`
	Held    int    `json:"held"`
}

// A Node is an end of a [Flow].
type Node struct {
	Kind string `json:"kind"` // producer, topic, group or dependency
	Name string `json:"name"`
}

// topology returns the flows of all guards, each path once.
func (c *Console) topology() []Flow {
	all := []Flow{}
	at := make(map[[2]Node]int)
	for _, g := range c.guards {
		for _, f := range g.Flows() {
			ends := [2]Node{Node(f.From), Node(f.To)}
			i, ok := at[ends]
			if !ok {
				i = len(all)
				at[ends] = i
				all = append(all, Flow{From: ends[0], To: ends[1]})
			}
			all[i].Count += f.Count
			all[i].Failed += f.Failed
			all[i].Sources += f.Sources
			all[i].Held += f.Held
		}
	}
	return all
}
