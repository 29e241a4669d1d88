// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

// sample is one value of a metric.
type sample struct {
	Name   string            `json:"name"`
	Type   string            `json:"type"` // counter, gauge, histogram, summary
	Labels map[string]string `json:"labels"`
	Value  string            `json:"value"` // as text: JSON knows no NaN
}

func metricsCommand(env environment, c *clientOptions) *cobra.Command {
	cmd := metricsList(env, c, "metrics", "Show the metrics of the agent")
	cmd.AddCommand(metricsList(env, c, "list", "List the metrics of the agent"))
	return cmd
}

func metricsList(env environment, c *clientOptions, use, short string) *cobra.Command {
	var match string
	cmd := listCommand(env, use, short, listing[sample]{
		kind: api.KindMetricList,
		key:  func(m *sample) string { return m.Name + labelsText(m.Labels) },
		fetch: func(ctx context.Context, _ []string) ([]sample, error) {
			pattern, err := regexp.Compile(match)
			if err != nil {
				return nil, usagef("--match: %w", err)
			}
			body, err := api.NewClient(c.socket).Metrics(ctx)
			if err != nil {
				return nil, err
			}
			defer body.Close()
			samples, err := parseMetrics(body)
			return slices.DeleteFunc(samples, func(m sample) bool { return !pattern.MatchString(m.Name) }), err
		},
		columns: []column[sample]{
			{title: "METRIC", cell: func(m *sample) string { return m.Name }},
			{title: "LABELS", cell: func(m *sample) string { return orDash(labelsText(m.Labels)) }},
			{title: "VALUE", cell: func(m *sample) string { return m.Value }},
			{title: "TYPE", wide: true, cell: func(m *sample) string { return m.Type }},
		},
	})
	cmd.Flags().StringVarP(&match, "match", "m", "", "only metrics whose name matches this `regexp`")
	return cmd
}

func labelsText(labels map[string]string) string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		texts = append(texts, fmt.Sprintf("%s=%q", name, labels[name]))
	}
	return strings.Join(texts, " ")
}

// parseMetrics reads the text format of Prometheus. Histograms and summaries come as their parts.
func parseMetrics(r io.Reader) ([]sample, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(r)
	if err != nil {
		return nil, fmt.Errorf("metrics of the agent: %w", err)
	}
	var samples []sample
	for _, name := range slices.Sorted(maps.Keys(families)) {
		f := families[name]
		vector, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{}, f)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("metric %s", name), err)
		}
		for _, s := range vector {
			m := sample{Type: strings.ToLower(f.GetType().String()), Labels: make(map[string]string), Value: formatValue(float64(s.Value))}
			for label, value := range s.Metric {
				if label == model.MetricNameLabel {
					m.Name = string(value)
				} else {
					m.Labels[string(label)] = string(value)
				}
			}
			samples = append(samples, m)
		}
	}
	slices.SortStableFunc(samples, func(a, b sample) int { return strings.Compare(a.Name, b.Name) })
	return samples, nil
}

// formatValue writes numbers as people do, unless they are very large or very small.
func formatValue(v float64) string {
	if size := math.Abs(v); v == 0 || size >= 1e-3 && size < 1e15 {
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
